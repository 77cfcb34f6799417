"""What every test can use."""

import signal

pytest_plugins = ["bed.plugin"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background so, and programs of tests would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
