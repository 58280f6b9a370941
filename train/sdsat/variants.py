"""The variants that the ablation compares."""

CONTINUED = "none"  # plain continued training, without adaptive tokens
REFERENCE = "isolated-self"
DATA = ("sdsat.adaptive_targets=data",)
# What each variant changes in the config. The config itself is REFERENCE: the isolated loss, self
# targets, one id, L = 5. They run in this order.
VARIANTS: dict[str, tuple[str, ...]] = {
    CONTINUED: ("sdsat.loss=basic", "sdsat.start_rate=0.0", *DATA),
    REFERENCE: (),
    "improved-data": ("sdsat.loss=improved", *DATA),
    "isolated-data": DATA,
    "basic-data": ("sdsat.loss=basic", *DATA),
    "improved-self": ("sdsat.loss=improved",),
    "isolated-self-distinct": ("sdsat.distinct=true",),
    "isolated-self-L3": ("sdsat.window=3",),
    "isolated-self-L7": ("sdsat.window=7",),
    # A quarter of the weight on the adaptive mean: less drafting against a better clean loss.
    "improved-data-w0.25": ("sdsat.loss=improved", "sdsat.weight=0.25", *DATA),
    "isolated-self-w0.25": ("sdsat.weight=0.25",),
}
