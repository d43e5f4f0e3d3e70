"""Names of the methods that a replica answers itself; any other name is an endpoint of its engine."""

GENERATE = "generate"
PREFILL = "prefill"
RELEASE = "release"
DRAIN = "drain"
WAIT_FOR_COUNTS = "expert_counts"  # see protocol.Engine.wait_for_counts
PLACE_EXPERTS = "place_experts"
# Methods whose calls need one of an engine's slots; other calls, such as those for expert counts, need none.
SLOT_METHODS = frozenset({GENERATE, PREFILL})
