raise ImportError("fdora.schedule is now fdora.jobs.schedule: import that, or run python -m fdora.jobs.schedule.")
