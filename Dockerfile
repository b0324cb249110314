# docker build -t lightning_autotp . && docker run --gpus all --shm-size 8g lightning_autotp lightning-autotp doctor
# NCCL and data loaders share memory between processes: give the container more of it than Docker's 64 MB.
FROM python:3.11-slim
WORKDIR /opt/lightning_autotp
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY lightning_autotp lightning_autotp
RUN pip install --no-cache-dir -c constraints.txt .
WORKDIR /work
