"""Execution of plans: on the processes of a job, or in one process over several devices."""
