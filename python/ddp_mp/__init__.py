"""The program `ddp-mp`, which uses the libtorch of the environment it is installed in."""


def __getattr__(name):
    if name == "record":
        from .recorder import record

        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
