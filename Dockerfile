# The program in an image, with a libtorch for machines with or without GPUs:
#
#     docker build -t ddp-mp .
#     docker run --rm ddp-mp --max-epochs=2 --batch-size=32
#
#     docker build -t ddp-mp:cuda --build-arg LIBTORCH_SET=cuda .
#     docker run --rm --gpus all --shm-size=1g ddp-mp:cuda --max-epochs=2 --batch-size=32
#
# hadolint reads it (`make lint`). No check of this project builds it: its CI has no Docker.

FROM rust:1-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make python3 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/ddp-mp
# cpu or cuda: the libraries that go into the image. Fetched first: changes of the source do not fetch them again.
ARG LIBTORCH_SET=cpu
COPY Makefile .
COPY .cargo .cargo
RUN make libtorch LIBTORCH_SET="$LIBTORCH_SET"
COPY . .
RUN cargo install --locked --path . --root /usr/local \
    && rm -rf .libtorch/torch/include

# The program's rpath is /opt/ddp-mp/.libtorch, so libtorch is copied to the same place.
FROM debian:bookworm-slim
COPY --from=build /opt/ddp-mp/.libtorch /opt/ddp-mp/.libtorch
COPY --from=build /usr/local/bin/ddp-mp /usr/local/bin/ddp-mp
# Which of the driver's libraries NVIDIA's container runtime makes visible.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home --uid 1000 trainer
USER 1000
WORKDIR /home/trainer
ENTRYPOINT ["ddp-mp"]
CMD ["--help"]
