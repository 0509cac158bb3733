"""The load format "kiln" of vLLM: weights from a process that holds them resident, by their aggregate.

    vllm serve MODEL_DIR --load-format kiln --model-loader-extra-config '{"aggregate": "sha256:…"}'

MODEL_DIR needs the config and the tokenizer only. Besides aggregate the extra config may have socket, the path of the
holder's, and adapters, a list of digests: each must be loaded on that base. Another base, or an adapter that is not of
this base, is refused before the model takes any memory. vLLM brings weights into layouts of its own: in the end it has
its own copy, and the lease ends when that is made. Adapters are checked only; vLLM reads their files itself.

Written against the interface of vLLM 0.32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

import kiln_attach

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.load import LoadConfig

FORMAT = "kiln"


def register() -> None:
    """The entry point: makes the load format known to vLLM."""
    register_model_loader(FORMAT)(KilnModelLoader)


class KilnModelLoader(BaseModelLoader):
    """Loads a model from resident weights."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra = load_config.model_loader_extra_config
        odd = set(extra) - {"aggregate", "socket", "adapters"} if isinstance(extra, dict) else extra
        if odd or "aggregate" not in extra:
            raise ValueError(
                "load format kiln: the extra config of the model loader is "
                f'{{"aggregate": "sha256:…"}}, with socket and adapters if you like, not {extra}'
            )
        self.aggregate, self.socket = extra["aggregate"], extra.get("socket")
        self.adapters = extra.get("adapters", [])

    def attach(self) -> kiln_attach.Attachment:
        """Attaches to the base, and asks for the adapters."""
        device = None
        if torch.cuda.is_available():
            device = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        # Writable: a model that changes what it is given gets pages of its own.
        held = kiln_attach.attach(self.aggregate, self.socket, device=device, writable=True)
        for digest in self.adapters:
            kiln_attach.attach(self.aggregate, self.socket, adapter=digest).close()
        return held

    def download_model(self, model_config: ModelConfig) -> None:
        """There is nothing to download. Fails if there is nothing to attach to."""
        self.attach().close()

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> Any:
        """Attaches first: what is refused costs no memory."""
        with self.attach():
            return super().load_model(vllm_config, model_config, prefix)

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        """Gives every tensor to the model. ValueError if a parameter is missing among them."""
        others = [s.model_or_path for s in getattr(model, "secondary_weights", ())]
        if others:
            raise ValueError(f"load format kiln: the model also wants weights from {others}, not of this base")
        with self.attach() as held:
            loaded = model.load_weights(iter(held.tensors().items()))
        if loaded is not None and model_config.quantization is None:
            DefaultModelLoader.track_weights_loading(self, model, loaded)
