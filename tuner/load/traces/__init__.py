"""Recorded traffic: one reader a format, streaming, every refused row counted by reason.

`reading` opens a file and gives its requests; `statistics` says what it contains; `detect`
tells the format. A reader is a function `read(file)` that yields requests and refused rows
one by one; `reading.READERS` has them all.
"""
