"""What the service does not do, and why: each reason travels as a gRPC status code, with a sentence."""

from enum import Enum


class Why(Enum):
    """The reasons; docs/service.md says what a client does about each."""

    INVALID = "the request is not one"
    UNKNOWN = "no such session"
    EXISTS = "the name is taken"
    UNFIT = "the session is another one than the client takes it for"
    OVER = "the incarnation is over"
    FULL = "too many of something"
    LATER = "not now"


class Refused(Exception):
    """A request that is not granted."""

    def __init__(self, why: Why, sentence: str) -> None:
        super().__init__(sentence)
        self.why = why
