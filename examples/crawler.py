"""A crawler: many reads at once, a few at a time, and none of them twice.

It serves a small web site to itself, so it needs no network. Try it in an empty folder:

    python crawler.py            # kill it in the middle: Ctrl-C, or `kill -9` from another terminal
    python crawler.py            # it goes on; pages that were fetched are not asked for again
    sort site.log | uniq -c      # what the site saw

Only a page whose answer was still on its way when the process died may stand there twice.
"""

import asyncio
import functools
import re
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import everstep
from everstep import step, workflow

PAGES = {"/": ["/tea", "/salt", "/sea"], "/tea": ["/leaf", "/cup"], "/salt": ["/sea", "/pan"], "/sea": ["/tide", "/"]}
AT_ONCE = 3


class Site(BaseHTTPRequestHandler):
    """The web site: it writes down every request, then takes its time."""

    def do_GET(self):
        with open("site.log", "a") as log:
            log.write(self.path + "\n")
        time.sleep(0.2)
        self.send_response(200)
        self.end_headers()
        self.wfile.write("".join(f'<a href="{link}">' for link in PAGES.get(self.path, [])).encode())

    def log_message(self, *args):
        pass


# The address changes with every start of this script. If it were an argument of the step, the code would ask for other
# calls than those in the history, and Everstep would hold the run. So the argument is the path, which stays the same.
@functools.cache
def site() -> str:
    """Start the web site and return its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


@step(effect="read", retry=everstep.Retry(attempts=3, first=0.1), timeout=10)
def fetch(path: str) -> str:
    with urllib.request.urlopen(site() + path) as answer:
        return answer.read().decode()


@workflow
async def crawl(start: str) -> list[str]:
    few = asyncio.Semaphore(AT_ONCE)  # plain asyncio; in a workflow it is durable
    seen = {start}

    async def visit(path: str) -> None:
        async with few:
            text = await asyncio.to_thread(fetch, path)  # how an `async` workflow calls a `def` step
        everstep.publish("seen", len(seen))
        new = [link for link in re.findall('href="(.*?)"', text) if link not in seen]
        seen.update(new)
        await asyncio.gather(*(visit(link) for link in new))

    await visit(start)
    return sorted(seen)


if __name__ == "__main__":
    print("pages:", *everstep.run(crawl, "/", id="crawl-1"))
