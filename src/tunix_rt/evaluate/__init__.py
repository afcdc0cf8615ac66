"""Did the model learn? Outputs are judged by pure functions (`score`), before is set against after (`report`)."""
