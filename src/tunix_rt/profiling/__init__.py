"""Where the time of a step goes: steps are recorded, the trace is read, and what it shows is said in a table."""
