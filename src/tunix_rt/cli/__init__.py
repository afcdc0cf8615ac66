"""The command line: a command parses, calls one stage, renders. Stages are imported when a command runs."""
