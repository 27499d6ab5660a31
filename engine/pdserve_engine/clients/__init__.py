"""The engine in a process of its own: SubprocessEngineClient here, an InprocEngineClient there.

A Unix socket carries the frozen dataclasses of messages.py, and nothing else, both ways.
"""
