"""``hps updates``: publish rows, control update streams; one module per kind of work."""

from __future__ import annotations

from hps.cli import updates_control, updates_dlq, updates_publish
from hps.cli.command_options import CommandApp

app = CommandApp(
    no_args_is_help=True, help="Publish rows, control update streams, show dead letters."
)
app.command(epilog=updates_publish.EXAMPLES)(updates_publish.publish)
app.command(epilog=updates_dlq.EXAMPLES)(updates_dlq.dlq)
app.command(epilog=updates_control.STATUS_EXAMPLES)(updates_control.status)
app.command(epilog=updates_control.PAUSE_EXAMPLES)(updates_control.pause)
app.command(epilog=updates_control.PAUSE_EXAMPLES.replace("pause", "resume"))(
    updates_control.resume
)
app.command(epilog=updates_control.SEEK_EXAMPLES)(updates_control.seek)
