"""The program `ddp-mp`, which uses the libtorch of the environment it is installed in."""
