"""Errors of a call that its client is told. Each has an HTTP status and a code, as clients of OpenAI expect them.

Clients try again after 408, 409, 429 and 5xx. So what will not change has another status.
"""

from __future__ import annotations

from stretto.errors import StrettoError


class CallError(StrettoError):
    """A call that cannot be answered."""

    status = 400
    code = "invalid_request"


class InvalidCallError(CallError):
    """A request that cannot be understood, or asks for something that there is not."""


class ContextLengthError(CallError):
    """No token fits behind the messages."""

    code = "context_length_exceeded"


class RefusedCallError(CallError):
    """The policy gives no more turns to this session: one of its limits is reached."""

    code = "limit_reached"


class RequestSizeError(CallError):
    """A request of too many bytes."""

    status = 413
    code = "request_too_large"


class UnknownKeyError(CallError):
    """A key that no open session has."""

    status = 401
    code = "invalid_api_key"


class OtherSessionError(CallError):
    """A key that is not that of the session in the address."""

    status = 403
    code = "other_session"


class SessionEndedError(CallError):
    """The session takes no more calls."""

    status = 403
    code = "session_ended"


class OtherRequestError(CallError):
    """A call under an idempotency key that another request has, or a second reward."""

    status = 422
    code = "other_request"


class BusyError(CallError):
    """A limit that holds now and may not hold in a moment."""

    status = 429
    code = "rate_limit_exceeded"


class ServerError(CallError):
    """A fault of the server."""

    status = 500
    code = "internal_error"
