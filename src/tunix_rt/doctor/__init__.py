"""doctor: which device is really there, and whether this environment can use it. Facts first, then pure judgement."""
