"""`--notify`: one message when a run fails, hangs, waits for long, or ends.

option      the option, and what it writes into the run's folder
receivers   who gets the messages: addresses, commands, mail; how one is delivered
watcher     which events of a record are worth a message: pure, the time is an argument; the process that follows the
            record and delivers: nothing waits for it
"""
