"""What holds for all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("nestpipe", deadline=None)  # a busy machine is not a wrong program
settings.load_profile("nestpipe")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell.  What is started here would inherit that, and Ctrl-C could not be tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)
