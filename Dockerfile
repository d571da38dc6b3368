# Stretto for one GPU, or for a CPU: docker build -t stretto . && docker run --gpus all -v "$PWD:/home/stretto" stretto train quickstart
# Everything is written to /home/stretto: runs, models, data and caches. Without a GPU leave `--gpus all` out.
FROM python:3.12-slim

# Triton compiles a small launcher for its kernels.
RUN apt-get update && apt-get install --no-install-recommends -y gcc libc6-dev && rm -rf /var/lib/apt/lists/*

# Torch first: it is large and changes rarely.
COPY constraints.txt /stretto/
RUN pip install --no-cache-dir --constraint /stretto/constraints.txt torch

COPY pyproject.toml README.md LICENSE /stretto/
COPY recipes /stretto/recipes
COPY src /stretto/src
RUN pip install --no-cache-dir --constraint /stretto/constraints.txt \
    "/stretto[reasoning-gym,parquet,serve,ray,tensorboard,prometheus]"

RUN useradd --create-home --uid 1000 stretto
USER stretto
WORKDIR /home/stretto
ENTRYPOINT ["stretto"]
CMD ["--help"]
