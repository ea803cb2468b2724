"""A disk that lies: flips one bit in the newest event of a run, in the store's file. A second time: flips it back."""

import sqlite3
from contextlib import closing

if __name__ == "__main__":
    with closing(sqlite3.connect("everstep.db")) as store, store:
        newest = store.execute("select seq, body from events where run = 'letters-1' order by seq desc").fetchone()
        body = bytearray(newest[1])
        body[len(body) // 2] ^= 1
        store.execute("update events set body = ? where run = 'letters-1' and seq = ?", (bytes(body), newest[0]))
        print("one bit of event", newest[0])
