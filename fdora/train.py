raise ImportError("fdora.train is now fdora.jobs.loop: import that.")
