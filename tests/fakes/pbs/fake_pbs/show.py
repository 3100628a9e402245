"""qstat."""

import json
import time

from fake_pbs.state import HAS_ENDED, SERVER, VERSION, fail, look, whole_id


def qstat(words):
    flags = [word for word in words if word.startswith("-")]
    ids = [word for word in words if not word.startswith("-") and word != "json"]
    data = look()
    if "-F" in flags and not data["json"]:
        return fail("qstat: invalid option -- 'F'\nusage: qstat [-f] [-W site_specific] ...", 2)
    if "-Q" in flags:
        return show_queues(data)
    if "-B" in flags:
        return show_server(data, is_full="-f" in flags)
    has_history = data["history"] and "-x" in flags
    shown, code = {}, 0
    for job_id in whole_ids(ids, data["jobs"], with_members="-t" in flags):
        job = data["jobs"].get(job_id)
        if job is None or (job["state"] == "F" and not data["history"]):
            if ids:
                code = fail(f"qstat: Unknown Job Id {job_id}", 153)
        elif job["state"] == "F" and not has_history:
            if ids:
                code = fail(f"qstat: {job_id} {HAS_ENDED}", 35)
        else:
            shown[job_id] = fields_of(job_id, job, data["jobs"])
            if data["eligible_time_enable"]:
                until = job.get("started") or time.time()
                shown[job_id]["eligible_time"] = clock(int(until - job["made_at"]))
    if "-f" in flags and "json" in words:
        head = {"timestamp": int(time.time()), "pbs_version": VERSION, "pbs_server": SERVER}
        # Recorded: with a complaint on stderr JSON comes all the same, without `Jobs`.
        print(json.dumps({**head, "Jobs": shown} if shown or not code else head, indent=4))
        return code
    for job_id, fields in shown.items():
        if "-f" in flags:
            print(f"Job Id: {job_id}")
            print(flat(fields), end="\n\n")
        else:
            print(job_id, fields["Job_Name"], fields["job_state"], fields["queue"])
    return code


def whole_ids(ids, jobs, *, with_members):
    """Return the jobs that are asked for; the members of an array by their names, or with -t."""
    asked = [whole_id(word) for word in ids] or [
        name for name, job in jobs.items() if "array_id" not in job
    ]
    for job_id in asked:
        yield job_id
        if with_members:
            yield from jobs.get(job_id, {}).get("members", ())


def show_queues(data):
    names = ["Max", "Tot", "Ena", "Str", "Que", "Run", "Hld", "Wat", "Trn", "Ext"]
    print(f"{'Queue':16} {' '.join(f'{name:>5}' for name in names)} Type")
    print(f"{'-' * 16} {' '.join(['-' * 5] * len(names))} ----")
    for queue in data["queues"]:
        states = [job["state"] for job in data["jobs"].values() if job["queue"] == queue]
        count = len(states) - states.count("F")
        open_, started = ("no" if queue in data[key] else "yes" for key in ("closed", "stopped"))
        cells = [0, count, open_, started, states.count("Q"), states.count("R"), states.count("H")]
        print(f"{queue:16} {' '.join(f'{cell:>5}' for cell in [*cells, 0, 0, 0])} Exe*")
    return 0


def show_server(data, *, is_full):
    """As recorded, without what nobody reads."""
    if is_full:
        print(f"Server: {SERVER}\n    server_state = Active\n    server_host = {SERVER}")
        print(f"    default_queue = {data['queues'][0]}\n    pbs_version = {VERSION}\n")
        return 0
    count = sum(job["state"] != "F" for job in data["jobs"].values())
    print(f"{'Server':16} {'Max':>5} {'Tot':>5} Status\n{'-' * 16} ----- ----- -----------")
    print(f"{SERVER:16} {0:>5} {count:>5} Active")
    return 0


def fields_of(job_id, job, jobs):
    asked = job["asked"]
    chunks = asked["chunks"]
    resources = {
        "mpiprocs": sum(chunk["mpiprocs"] for chunk in chunks),
        "ncpus": sum(chunk["ncpus"] for chunk in chunks),
        "ngpus": sum(chunk["ngpus"] for chunk in chunks),
        "nodect": len(chunks),
        "place": asked["place"],
        "select": asked["select"],
    }
    if asked["walltime"] is not None:
        seconds = asked["walltime_s"]
        resources["walltime"] = clock(seconds)
    fields = {
        "Job_Name": job["name"],
        "Job_Owner": f"lab@{SERVER}",
        "job_state": job["state"],
        "queue": job["queue"],
        "server": SERVER,
        "Error_Path": f"{SERVER}:{job['err']}",
        "Output_Path": f"{SERVER}:{job['out']}",
        "Join_Path": job["join"],
        "Keep_Files": job["keep"],
        "Hold_Types": job["hold_types"],
        "Submit_arguments": job["arguments"],
        "Variable_List": {k: v for k, v in job["variables"].items() if k.startswith("PBS_O_")},
        "Resource_List": resources,
        "substate": job["substate"],
        "run_count": job["run_count"],
        "Rerunable": str(job["rerun"]),
        "project": job["project"],
    }
    if job["hosts"]:
        fields |= {"exec_host": job["exec_host"], "exec_vnode": job["exec_vnode"]}
    if job["session"] is not None:
        fields |= {"session_id": job["session"], "jobdir": "/home/lab", "etime": job["ctime"]}
        fields |= {"stime": time.strftime("%c", time.localtime(job["started"]))}
        fields["resources_used"] = {"cput": clock(job["cput_s"]), "mem": f"{job['mem_kb']}kb"}
    edges = [] if job["state"] == "F" else [tuple(edge) for edge in job["depend"]]
    # Recorded: who waits for this one is listed, too, and a finished job keeps that.
    edges += [
        (kind.replace("after", "before"), name)
        for name, other in jobs.items()
        for kind, before in other["depend"]
        if before == job_id
    ]
    if edges:
        fields["depend"] = ",".join(f"{kind}:{other}@{SERVER}" for kind, other in edges)
    if "members" in job:
        fields |= array_fields([jobs[name] for name in job["members"]], job)
    if "array_id" in job:
        fields |= {"array_id": job["array_id"], "array_index": job["array_index"]}
    extra = {"Account_Name": job["account"], "comment": job["comment"], "Exit_status": job["exit"]}
    return fields | {key: value for key, value in extra.items() if value is not None}


def array_fields(members, job):
    states = [member["state"] for member in members]
    waiting = [str(member["array_index"]) for member in members if member["state"] == "Q"]
    counts = {"Queued": "Q", "Running": "R", "Exiting": "E", "Expired": "X"}
    return {
        "array": "True",
        "array_state_count": " ".join(f"{k}:{states.count(v)}" for k, v in counts.items()),
        "array_indices_submitted": job["submitted"],
        "array_indices_remaining": ",".join(waiting) or "-",
    }


def clock(seconds):
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def flat(fields):
    """Return what `qstat -f` prints of a job: `Resource_List.ncpus = 4`, long values wrapped behind a tab."""
    lines = []
    for key, value in fields.items():
        parts = (
            {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        )
        for name, text in parts.items():
            line = f"    {name} = {text}"
            while len(line) > 79:
                lines.append(line[:79])
                line = f"\t{line[79:]}"
            lines.append(line)
    return "\n".join(lines)
