raise ImportError("fdora.plan is now fdora.jobs.plan: import that, or run fdora plan.")
