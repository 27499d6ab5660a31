"""The names of what ports refuse or cut, as the metric has them (docs/metrics.md)."""

TOO_MANY_MESSAGES = "too_many_messages"
MADE_ROOM = "made_room"
SLOW_MESSAGE = "slow_message"
TOO_MANY_STREAMS = "too_many_streams"

# By the server of the port.
LIMITS = {
    "grpc": (TOO_MANY_MESSAGES, MADE_ROOM, SLOW_MESSAGE, TOO_MANY_STREAMS),
}
