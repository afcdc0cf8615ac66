# tunix-rt on a CPU: docs/guides/install.md has the commands. The wheel in dist/ comes from `scripts/release build`.
FROM python:3.12-slim-bookworm
ARG TORCH=2.13.0
RUN useradd --create-home --uid 1000 tunix
COPY constraints.txt dist/*.whl /opt/tunix-rt/
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch==${TORCH}" \
 && for wheel in /opt/tunix-rt/*.whl; do \
      pip install --no-cache-dir --constraint /opt/tunix-rt/constraints.txt "${wheel}[torch]" || exit 1; \
    done
USER 1000
WORKDIR /home/tunix
RUN mkdir runs
ENTRYPOINT ["tunix-rt"]
CMD ["train", "demo", "--output", "runs/demo", "--device", "cpu"]
