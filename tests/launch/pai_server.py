# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the REST server of an OpenPAI cluster, both versions of its API.

It answers with the documented status codes and error bodies ({"code", "message"}) and keeps what it
was sent in `requests`, so that a test can look at it. Jobs live in memory. Tasks of a job that was
submitted are made from its roles, and their logs are served by the same process.
"""
import contextlib
import http.server
import json
import re
import ssl
import threading

TOKEN = "header.payload.signature"
OTHERS = {"mallory"}  # whose jobs our token may not touch


class Refusal(Exception):
    def __init__(self, status, code, message):
        super().__init__(message)
        self.status, self.body = status, {"code": code, "message": message}


def missing_job(name):
    return Refusal(404, "NoJobError", f"Job {name} is not found.")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    routes = []  # (method, pattern, function)

    def log_message(self, *_):
        pass

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.server.requests.append((self.command, self.path, dict(self.headers), body))
        self.extra = {}
        try:
            status, reply = self.dispatch(body)
        except Refusal as refusal:
            status, reply = refusal.status, refusal.body
        text = reply if isinstance(reply, str) else json.dumps(reply)
        self.send_response(status)
        kind = "text/plain" if isinstance(reply, str) else "application/json; charset=utf-8"
        self.send_header("Content-Type", self.extra.pop("Content-Type", kind))
        for name, value in self.extra.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST = do_PUT = answer

    def dispatch(self, body):
        for method, pattern, function in self.routes:
            match = re.fullmatch(pattern, self.path)
            if method == self.command and match:
                return function(self, body, *match.groups())
        raise Refusal(404, "NoApiError", f"API {self.path} is not found.")

    # --- Rights ---

    def need_token(self, user):
        said = self.headers.get("Authorization")
        if said != f"Bearer {TOKEN}":
            raise Refusal(401, "UnauthorizedUserError", "Guest is not allowed to do this.")
        if user in OTHERS:
            raise Refusal(403, "ForbiddenUserError", f"User alice is not allowed to touch {user}.")

    def job(self, user, name):
        if (user, name) not in self.server.jobs:
            raise missing_job(name)
        return self.server.jobs[user, name]

    def add(self, user, name, roles):
        if (user, name) in self.server.jobs:
            raise Refusal(409, "ConflictJobError", f"Job name {name} already exists.")
        self.server.jobs[user, name] = {"state": "RUNNING", "roles": roles}

    # --- v1 ---

    def submit_v1(self, body, user):
        self.need_token(user)
        try:
            job = json.loads(body)
        except ValueError as error:
            raise Refusal(400, "InvalidParametersError", str(error)) from None
        if "sshPort" in job.get("extras", {}):  # what only the server knows to be wrong
            raise Refusal(400, "InvalidParametersError", 'child "extras" fails: "sshPort" is taken')
        if job["image"] == "explode":
            raise Refusal(500, "UnknownError", "Unexpected token in the launcher's answer")
        if "killAllOnCompletedTaskNumber" in job:
            self.extra["X-Warning"] = "killAllOnCompletedTaskNumber has been obsoleted"
        self.add(user, job["jobName"], {role["name"]: role.get("taskNumber", 1)
                                        for role in job["taskRoles"]})
        self.extra["Location"] = f"/api/v1/user/{user}/jobs/{job['jobName']}"
        return 201, {"message": f"update job {job['jobName']} successfully"}

    # --- v2 ---

    def submit_v2(self, body):
        self.need_token("alice")
        if not self.headers.get("Content-Type", "").startswith("text/"):
            raise Refusal(400, "InvalidProtocolError", "The protocol must be sent as text.")
        name = re.search(r'^name: "?([\w-]+)"?$', body, flags=re.M)
        if name is None:
            raise Refusal(400, "InvalidProtocolError", "Failed to parse protocol: no name.")
        roles = re.findall(r"^  (\w+):\n    instances: (\d+)$", body, flags=re.M)
        self.add("alice", name[1], {role: int(n) for role, n in roles})
        return 202, {"message": f"Update job {name[1]} for user alice successfully."}

    # --- Both ---

    def status(self, _, user, name):
        job = self.job(user, name)
        where = {"worker": f"http://127.0.0.1:{self.server.log_port}",
                 "nobody": "http://127.0.0.1:1"}
        return 200, {
            "name": name,
            "jobStatus": {"username": user, "state": job["state"], "subState": "FRAMEWORK_RUNNING",
                          "appExitCode": job.get("exit_code"), "retries": 0},
            "taskRoles": {role: {"taskRoleStatus": {"name": role}, "taskStatuses": [
                {"taskIndex": i, "taskState": job["state"], "containerIp": f"10.0.0.{i + 4}",
                 "containerExitCode": job.get("exit_code"),
                 "containerLog": f"{where.get(role, '')}/log/{name}/{role}/{i}"}
                for i in range(n)]} for role, n in job["roles"].items()}}

    def log(self, _, name, role, index):
        if role == "gone":
            raise Refusal(404, "NoLogError", f"The log of {role}-{index} was deleted.")
        if role == "page":
            self.extra["Content-Type"] = "text/html"
        return 200, f"{name}: the log of {role}-{index}\n"

    def stop(self, body, user, name):
        self.need_token(user)
        self.job(user, name)
        if json.loads(body) != {"value": "STOP"}:
            raise Refusal(400, "InvalidParametersError", '"value" must be one of [START, STOP]')
        self.server.jobs[user, name]["state"] = "STOPPED"
        return 202, {"message": f"execute job {name} successfully"}


NAME = r"([\w.~-]+)"
Handler.routes = [
    ("POST", rf"/api/v1/user/{NAME}/jobs", Handler.submit_v1),
    ("GET", rf"/api/v1/user/{NAME}/jobs/{NAME}", Handler.status),
    ("PUT", rf"/api/v1/user/{NAME}/jobs/{NAME}/executionType", Handler.stop),
    ("POST", r"/api/v2/jobs", Handler.submit_v2),
    ("GET", rf"/api/v2/jobs/([\w.-]+)~{NAME}", Handler.status),
    ("PUT", rf"/api/v2/jobs/([\w.-]+)~{NAME}/executionType", Handler.stop),
    ("GET", rf"/log/{NAME}/{NAME}/(\d+)", Handler.log),
]


@contextlib.contextmanager
def serve(certificate=None, tls=None):
    """A running server: `url`, `requests` and `jobs`. certificate: a PEM file with its key; tls:
    the one version it speaks."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.jobs = [], {}
    server.log_port = server.server_port
    server.url = f"{'https' if certificate else 'http'}://localhost:{server.server_port}"
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        if tls:
            context.minimum_version = context.maximum_version = tls
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
