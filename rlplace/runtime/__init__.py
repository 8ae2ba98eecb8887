"""Running a plan: in one process over several devices."""
