"""`approvals` and `approve`, and what the other commands say about approvals."""

import json
import shutil
from pathlib import Path

from tests.cli.conftest import INSTRUCTIONS, Folder


def test_what_waits_is_listed_with_its_arguments_and_the_line_that_answers_it(folder: Folder) -> None:
    shutil.copy(Path(__file__).with_name("approving.py"), folder.path / "approving.py")
    process = folder.begin("run", "approving.py:paying", "12", "--id", "p-1")
    folder.wait_for(lambda: folder.run_row("p-1")[0] == "waiting")
    (one,) = folder.json("approvals")
    assert one["what"] == "pay"
    assert one["arguments"]["usd"] == 12
    line = f"everstep approve p-1 true --id {one['id']}"
    assert any(line in said for said in process.stderr), "the process itself says so, while it waits"
    for command in (("approvals",), ("approvals", "--run", "p-1"), ("show", "p-1")):
        said = folder.everstep(*command)
        assert line in said.out
        assert '"usd": 12' in said.out.replace('"usd":12', '"usd": 12')
        assert not INSTRUCTIONS.search(said.out)
    assert "everstep approvals" in folder.everstep("ls").out
    (wait, _) = folder.json("show", "p-1")["waits_for"]
    assert (wait["approval"], wait["id"]) == ("pay", one["id"])

    wrong = folder.everstep("approve", "p-1", "1", "--id", one["id"])
    assert wrong.status == 2
    assert "wants a bool" in wrong.err
    unknown = folder.everstep("approve", "p-1", "true", "--id", "1-000000000000")
    assert "everstep.approval.conflict" in unknown.err
    done = folder.everstep("approve", "p-1", "false", "--id", one["id"], "--note", "too much")
    assert (done.status, "pay is answered with false" in done.out) == (0, True)
    again = folder.everstep("approve", "p-1", "true", "--id", one["id"])
    assert again.status == 2
    assert "has its answer already: false by " in again.err

    folder.wait_for(lambda: [one["what"] for one in folder.json("approvals")] == ["tell"])
    (secret,) = folder.json("approvals")
    assert secret["arguments"] == "(secret)"
    assert folder.json("approve", "p-1", "0", "--what", "tell")["answer"] == 0
    ended = folder.finish(process)
    assert ended.status == 0
    assert json.loads(ended.out) == [False, 0]
    everything = "".join(folder.everstep(*words).out for words in (("show", "p-1"), ("history", "p-1", "--json")))
    assert "abracadabra" not in everything
    assert "too much" in everything
    assert folder.everstep("approvals").out.startswith("Nothing waits for an approval")
    assert folder.everstep("check").status == 0
