"""Workers on one PostgreSQL server, and somebody who breaks both at random."""
