"""Methods that vLLM adds to its workers (`worker_extension_cls`). Imported by vLLM in each of its worker processes."""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Is mixed into vLLM's worker, whose attributes it uses."""

    model_runner: Any

    def stretto_repack_head(self) -> int:
        """Packs the weights of the output layer again, after a reload. Returns the number of layers packed.

        On the CPU a linear layer computes from a packed copy of its weight. A reload packs every layer again but an
        output layer that shares the weight of the embedding: that would go on with the old one, without an error.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        packed = 0
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
                packed += 1
        return packed
