"""The sentences of the server's log: the name of each, and what it means to who operates it."""

from protocol.log_lines import sentence

_PEER = r"(?P<peer>\S+:\d+)"

EVENTS = (
    sentence(
        "listening",
        r"listening on (?P<address>\S+), workers to come: (?:(?P<workers>\d+)|auto)",
        "the port is open",
        "start the workers",
    ),
    sentence(
        "tls",
        r"TLS 1\.3.*; fingerprint of the certificate: (?P<fingerprint>\w+)",
        "clients must use TLS",
        "workers without the authority's file can be given the fingerprint: `--tls-fingerprint`",
    ),
    sentence(
        "crowded",
        r"too many connections wait to be let in; (?P<address>\S+) is the first to be closed",
        "more callers than there is room for, none of which has proved itself",
        "see who calls; let only the addresses of clients reach the port",
    ),
    sentence("status_page", r"the status page is at (?P<address>.*)", "where to look"),
    sentence(
        "exposed",
        r"WARNING: .*",
        "who reaches the port could join, or read and alter the traffic",
        "use tokens and TLS, or a network that you trust",
    ),
    sentence(
        "gathering",
        r"workers so far: (?P<workers>\d+); the run begins when no other has come for \S+ s",
        "`--workers auto`: how many have come; said when the number changes",
        "start those that are missing",
    ),
    sentence(
        "gathered",
        r"(?:no further worker has come: the run is|the checkpoint is of a run) for (?P<workers>\d+)"
        r"(?: workers, and so is this one)?",
        "`--workers auto`: the number is known, and is that of the ranks from here on",
    ),
    sentence("joined", r"WHO(?: on (?P<host>\S+))? has joined", "a client takes part"),
    sentence("returned", r"WHO on (?P<host>\S+) has returned", "a client that was lost is back"),
    sentence(
        "left_before_start",
        r"WHO (?:has left|is lost \((?P<reason>.*)\)) before the start; waiting for it",
        "a client went before round 0; the start waits for it again",
        "start it again",
    ),
    sentence(
        "lost",
        r"WHO is lost(?: for the \S+ time in round (?P<step>\d+))?: (?P<reason>.*)",
        "a connection broke or fell silent; the sentence says what the run does",
        "look at the client's log; start it again if it does not come back by itself",
    ),
    sentence("left", r"WHO has left; .*", "a client said goodbye before the end"),
    sentence(
        "started",
        r"(?:all workers are there: (?P<workers>\d+)|the run begins with ).*",
        "the start waits for nobody",
    ),
    sentence("initial_values", r"initial values came from WHO", "round 0 can begin"),
    sentence(
        "push_refused",
        r"WHO: push of step (?P<step>\d+) refused: (?P<reason>.*)",
        "a gradient cannot be used (NaN, Inf, another batch); it counts with weight 0",
        "look at this worker's data; lower the learning rate if all do it",
    ),
    sentence(
        "round_void",
        r"round (?P<step>\d+) is void: .*",
        "no push could be used, or the rule gave all weight 0 (said once of rounds in a row); ten in a row end the "
        "run as diverged",
        "as for `push_refused`; of a rule, look whether the workers still learn",
    ),
    sentence(
        "late",
        r"round (?P<step>\d+) waited \S+ s for WHO, alive but late, and closes without it",
        "a worker is slower than `--round-timeout`",
        "give it less work or more time",
    ),
    sentence(
        "validator_late",
        r"round (?P<step>\d+) waited \S+ s for WHO and closes without it, as do .*",
        "a round that was to be validated closes by prediction",
        "look at the validator",
    ),
    sentence(
        "probation",
        r"WHO (?:was late in \d+ rounds in a row: it is on probation|is alive and has held the others for).*",
        "a worker is not waited for until it is in time again",
        "as for `late`",
    ),
    sentence(
        "software_changed",
        r"WHO computes on .*: the last bits may differ",
        "a worker came back with other software or on another kind of CPU",
        "nothing, unless you need the same bits",
    ),
    sentence(
        "quorum_shrunk",
        r"the quorum of \d+ shrinks to \d+ until another worker comes",
        "fewer workers are left than `--quorum`",
    ),
    sentence(
        "no_goodbye",
        r"(?:.* did not take leave after the last step|an evaluator did not come in time to measure .*)",
        "the end waited `--drain-timeout` for somebody in vain; the result is whole",
    ),
    sentence(
        "waiting",
        r"(?:the (?:start|end) waits for .*|(?:round|step) (?P<step>\d+) (?:waits for|has no push yet).*"
        r"|.* may not fall further behind; the others wait.*)",
        "for whom the run waits, and since when; said every 10 s",
        "start or look at who is named",
    ),
    sentence(
        "refused",
        rf"{_PEER} refused(?: \((?P<cause>[a-z_]+)\))?: (?P<reason>.*)",
        "a client was turned away",
        "the causes are in [RUNNING.md](RUNNING.md#why-a-server-refuses)",
    ),
    sentence(
        "proof_failed",
        rf"{_PEER} failed the proof as (?P<role>\S+) '(?P<name>.*)', rank (?P<claimed>.*)",
        "a token is wrong, or not for this name, role and rank",
        "compare the client's token file with the server's; many from an unknown address are an attack",
    ),
    sentence(
        "cut_off",
        rf"{_PEER} cut off: (?P<reason>.*)",
        "bytes that are no protocol, such as a port scan; nothing else is touched",
        "close the port to strangers",
    ),
    sentence(
        "gave_up", rf"{_PEER} gave up before it had joined: (?P<reason>.*)", "a caller went before it had joined"
    ),
    sentence(
        "left_out",
        r"lines on connections that have not joined were left out: (?P<lines>\d+)",
        "a flood of callers: so many lines on them were not written",
        "see the lines before and after for where they come from; close the port to strangers",
    ),
    sentence(
        "overloaded",
        rf"(?:the server cannot take more connections for now: .*|{_PEER} was turned away: .*)",
        "descriptors or threads are short; those that are connected go on",
        "raise the limit of open files (`LimitNOFILE`, `ulimit -n`)",
    ),
    sentence(
        "fresh", r"no checkpoint in (?P<path>.*) yet: the run starts afresh", "`--resume` found an empty directory"
    ),
    sentence(
        "resumed",
        r"going on from step (?P<step>\d+) of (?P<steps>\d+), of a checkpoint in (?P<path>.*)",
        "the run goes on from a checkpoint",
    ),
    sentence(
        "settings_changed",
        r"going on with .*, the checkpoint is of a run with .*",
        "an option is not that of the run before; the sentence says if values will differ for it",
        "see that you meant it",
    ),
    sentence("nothing_left", r"no step is left to do; .*", "the checkpoint is of the last step", "more `--steps`"),
    sentence(
        "checkpoint_damaged",
        r".*; it is passed over",
        "a checkpoint does not verify; an older one is used",
        "look at the disk; restore a copy if too much is lost",
    ),
    sentence(
        "checkpoint_abandoned",
        r"checkpoint (?P<path>.*) is later than step (?P<step>\d+) and is now .*",
        "a checkpoint is no part of the history that goes on, and was renamed",
        "remove it when you do not need it",
    ),
    sentence(
        "checkpoint_failed",
        r".*; training goes on without it, and this reason is told once.*",
        "a checkpoint could not be written",
        "free the disk",
    ),
    sentence(
        "checkpoint_skipped",
        r"no last checkpoint is written, since the values of step (?P<step>\d+) could not be made.*",
        "the run ended in the midst of an update",
        "go on from the checkpoint before with `--resume`",
    ),
    sentence(
        "checkpoint_cleanup",
        r"(?:removing .*: its server ended .*|.*; old checkpoints are not removed|.* cannot be removed: .*)",
        "old or unfinished checkpoints are removed, or cannot be",
        "look at the permissions of the directory",
    ),
    sentence(
        "not_written",
        r".* cannot be written \(.*\): the run goes on without .*",
        "`rounds.jsonl` or TensorBoard's files end here; training goes on",
        "free the disk",
    ),
    sentence(
        "points_dropped",
        r"\d+ points for TensorBoard were dropped: the disk is slow",
        "TensorBoard's curves have gaps; training did not wait for them",
    ),
    sentence(
        "page_failed",
        r"the status page could not serve .*",
        "a request to the status page failed; training goes on",
        "report it, with the log",
    ),
    sentence("memory", r".* the server will hold .*", "what the server will need, computed beforehand"),
    sentence(
        "muted",
        r"step (?P<step>\d+): worker ['\"](?P<name>.*?)['\"] is muted: (?P<reason>.*)",
        "the rule gives a worker next to no weight, and why",
        "look at this worker's data and machine",
    ),
    sentence(
        "trusted",
        r"step (?P<step>\d+): worker ['\"](?P<name>.*?)['\"] is trusted again: (?P<reason>.*)",
        "a muted worker counts again",
    ),
    sentence(
        "weight_changed",
        r"step (?P<step>\d+): worker ['\"](?P<name>.*?)['\"] now counts .*",
        "a worker's weight has changed markedly, and why",
    ),
    sentence(
        "fell_back",
        r"round (?P<step>\d+): .*; this is said once",
        "too few pushes for the rule; another one judged this round",
    ),
    sentence(
        "vote_missing",
        r"rank (?P<rank>\d+) does not vote at step (?P<step>\d+): .*",
        "a member's answers to the test set cannot be used",
        "look at this member",
    ),
    sentence(
        "vote", r"step (?P<step>\d+): weighted vote .*", "an ensemble's share of right answers on the test set"
    ),
    sentence("fault_injected", r"faults will be injected: .*", "`--inject` was given", "leave it out in earnest"),
    sentence("exported", r"final values are in (?P<path>.*)", "`--export` is written"),
    sentence("done", r"done: (?P<step>\d+) steps in .*", "the run is done; exit code 0"),
    sentence(
        "failed",
        r"the server itself has failed.*",
        "a fault of the program; a traceback follows",
        "report it, with the log",
    ),
)
"""The sentences of the server, in the order in which they are tried."""
