"""What happened in a run, on one page that needs no network: `rrl report`.

`history` reads the log, `sections` say what is shown, `figures` draw, `rollouts` choose what can be
browsed, `markup` turns all of it into one safe file.
"""
