"""The names of what ports refuse or cut, as the metric has them (docs/metrics.md)."""

TOO_MANY_MESSAGES = "too_many_messages"
MADE_ROOM = "made_room"
SLOW_MESSAGE = "slow_message"
TOO_MANY_STREAMS = "too_many_streams"
HEADERS_TOO_LARGE = "headers_too_large"
SLOW_HEADERS = "slow_headers"
BAD_HANDSHAKE = "bad_handshake"
PIPELINED = "pipelined"
TOO_MANY_CONNECTIONS = "too_many_connections"
TOO_MANY_OF_ADDRESS = "too_many_of_address"

# By the server of the port.
LIMITS = {
    "grpc": (TOO_MANY_MESSAGES, MADE_ROOM, SLOW_MESSAGE, TOO_MANY_STREAMS),
    "http": (
        TOO_MANY_CONNECTIONS,
        TOO_MANY_OF_ADDRESS,
        MADE_ROOM,
        BAD_HANDSHAKE,
        SLOW_HEADERS,
        HEADERS_TOO_LARGE,
        PIPELINED,
        TOO_MANY_MESSAGES,
    ),
    "metrics": (MADE_ROOM, SLOW_HEADERS),
}
