"""Drawn examples have no deadline: on a busy computer the time of one of them says nothing."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
