"""Where the time of a step goes, from a profiler trace."""
