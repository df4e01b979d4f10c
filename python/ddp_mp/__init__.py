"""Records training runs of PyTorch, and finds the first number in which two of them differ."""


def __getattr__(name):
    if name == "record":
        from .recorder import record

        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
