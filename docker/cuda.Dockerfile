# tunix-rt on an NVIDIA GPU: docs/guides/install.md has the commands. The wheel in dist/ comes from `scripts/release build`.
# torch brings the CUDA libraries; driver and GPU come from the host, through the NVIDIA Container Toolkit.
FROM python:3.12-slim-bookworm
ARG TORCH=2.13.0
# docs/reference/wheels.md has the drivers and GPUs of each build.
ARG CUDA=cu130
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Triton compiles its launchers with gcc. Debian removes old versions of a package from its mirrors, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 tunix
COPY constraints.txt dist/*.whl /opt/tunix-rt/
RUN pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/${CUDA}" "torch==${TORCH}" \
 && for wheel in /opt/tunix-rt/*.whl; do \
      pip install --no-cache-dir --constraint /opt/tunix-rt/constraints.txt "${wheel}[torch]" || exit 1; \
    done
USER 1000
WORKDIR /home/tunix
RUN mkdir runs
ENTRYPOINT ["tunix-rt"]
CMD ["train", "demo", "--output", "runs/demo", "--device", "cuda"]
