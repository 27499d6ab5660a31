"""What a worker holds of its engine: an EngineClient, with the engine in its own process or, behind
a Unix socket that carries the frozen dataclasses of messages.py, in another one.
"""
