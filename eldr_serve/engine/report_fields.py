"""Names of the fields with which a replica describes itself to the ingresses."""

# -- fields of the replica's metadata, which Ray Serve passes on once
ADDRESS = "eldr_channel"  # address of its channel server, see Address
BLOCK_TOKENS = "eldr_block_tokens"  # tokens of a block of its prefix cache
SLOTS = "eldr_slots"  # see protocol.Engine.slots

# -- field of the metadata and of the report
RANKS = "eldr_ranks"  # metadata: number of data-parallel ranks; report: a report of each rank

# -- fields of the report, which the replica sends with each ping
KV_USAGE = "eldr_kv_usage"  # share of KV blocks in use, 0 to 1
REPORT_NUMBER = "eldr_report_number"  # sequence number of the report; it repeats if there is no new report
QUEUE = "eldr_prefill_queue"  # see QueueReport
EXPERTS = "eldr_experts"  # see protocol.Engine.expert_status
