"""Many runs in one process: claiming, committing, leases, queues, schedules."""
