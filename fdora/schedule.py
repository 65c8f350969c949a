raise ImportError("fdora.schedule is now fdora.jobs.schedule: import that, or run fdora schedule.")
