"""Names of variables by which an agent is told what stands in no command line."""

COMMAND = "FLAGSCALE_NOTIFY_COMMAND"
WEBHOOK = "FLAGSCALE_NOTIFY_WEBHOOK"
