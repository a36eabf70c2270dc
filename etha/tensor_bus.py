"""Importing this fails and says what to write instead, because another project called Etha has its client here."""

raise ImportError(
    "sub-etha has no etha.tensor_bus: write `from etha import TensorBusClient` (asyncio: AsyncTensorBusClient). "
    "A client finds or starts its agent by itself, so agent_rank, LMDB paths and bootstrap_client go; register_tensors "
    "returns a BatchHandle. docs/moving.md has the whole table",
    name=__name__,
)
