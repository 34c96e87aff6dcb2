#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`horovodrun pai`: job files that are written and checked, and the REST API of a cluster.

Usage: test_pai.py BUILD-DIRECTORY [unittest arguments]
"""
import copy
import json
import pathlib
import re
import ssl
import subprocess
import tempfile

from launching import ROOT, Case, main, run
from pai_server import TOKEN, serve

SEED = pathlib.Path(__file__).with_name("pai_seed.json")

INIT = ["pai", "init", "--image", "your/images/url", "--gpus", 1, "--rdma"]


def new_job(form, *words):
    return run(*INIT, "--format", form, *words, "python", "train.py")[0]


def put(path, value):
    """A change of a job: the value goes to a.b[0].c; None removes."""
    def change(job):
        *steps, last = [int(step) if step.isdigit() else step
                        for step in re.findall(r"[^.\[\]]+", path)]
        for step in steps:
            job = job[step]
        if value is None:
            del job[last]
        else:
            job[last] = value
    return change


# What is changed in the seed's job, the path that must be named, a part of the sentence.
WRONG_V1 = [
    (put("jobNmae", "x"), "jobNmae", "did you mean jobName?"),
    (put("jobName", None), "jobName", "is missing"),
    (put("jobName", "a~b"), "jobName", 'is "a~b"'),
    (put("image", ""), "image", "is empty"),
    (put("image", 7), "image", "must be a text"),
    (put("taskRoles", []), "taskRoles", "at least one"),
    (put("taskRoles", {}), "taskRoles", "must be a list"),
    (put("taskRoles[1].name", "my-worker"), "taskRoles[1].name", 'no "-"'),
    (put("taskRoles[1].name", "master"), "taskRoles[1].name", "twice"),
    (put("taskRoles[0].taskNumber", 0), "taskRoles[0].taskNumber", "at least 1"),
    (put("taskRoles[0].cpuNumber", "2"), "taskRoles[0].cpuNumber", "must be a whole number"),
    (put("taskRoles[0].gpuNumber", -1), "taskRoles[0].gpuNumber", "at least 0"),
    (put("taskRoles[0].gpuNumber", 0.5), "taskRoles[0].gpuNumber", "must be a whole number"),
    (put("taskRoles[1].shmMB", 20480), "taskRoles[1].shmMB", "memoryMB (10240)"),
    (put("taskRoles[0].minFailedTaskCount", 0), "taskRoles[0].minFailedTaskCount", "at least 1"),
    (put("taskRoles[1].minSucceededTaskCount", 2), "taskRoles[1].minSucceededTaskCount",
     "taskNumber (1)"),
    (put("taskRoles[0].command", None), "taskRoles[0].command", "is missing"),
    (put("taskRoles[0].comand", "x"), "taskRoles[0].comand", "did you mean command?"),
    (put("taskRoles[0].portList", [{"beginAt": 0}]), "taskRoles[0].portList[0].label",
     "is missing"),
    (put("taskRoles[0].portList", [{"label": "a", "port": 1}]), "taskRoles[0].portList[0].port",
     "no such key"),
    (put("retryCount", -3), "retryCount", "at least -2"),
    (put("jobEnvs.MY-VAR", 1), "jobEnvs.MY-VAR", "MY-VAR"),
]

# Text of the written v2 job, what it is replaced by, path, part of the sentence.
WRONG_V2 = [
    ('name: "horovod-job"', 'name: "horovod.job"', "name", 'is "horovod.job"'),
    ("protocolVersion: 2", "protocolVersion: 3", "protocolVersion", "one of 2"),
    ("type: job\n", "type: batch\n", "type", "one of job"),
    ("type: job\n", "type: job\nversions: 1\n", "versions", "did you mean version?"),
    ("type: job\n", "type: job\ntype: job\n", "type", "is given twice"),
    ("  worker:\n", "  my-worker:\n", "taskRoles.my-worker", 'no "-"'),
    ("    dockerImage: image\n", "    dockerImage: imgae\n", "taskRoles.master.dockerImage",
     "is not a dockerimage of prerequisites"),
    ("      gpu: 1\n", "", "taskRoles.master.resourcePerInstance.gpu", "is missing"),
    ("      gpu: 1\n", "      gpus: 1\n      gpu: 1\n",
     "taskRoles.master.resourcePerInstance.gpus", "did you mean gpu?"),
    ("infiniband: true", "infinband: true",
     "taskRoles.master.extraContainerOptions.infinband", "did you mean infiniband?"),
    ("infiniband: true", "infiniband: yes please",
     "taskRoles.master.extraContainerOptions.infiniband", "true or false"),
    ("shmMB: 256", "shmMB: 10241", "taskRoles.master.extraContainerOptions.shmMB",
     "memoryMB (10240)"),
    ("minFailedInstances: 1", "minFailedInstances: 5",
     "taskRoles.master.completion.minFailedInstances", "instances (1)"),
    ("    uri: \"your/images/url\"\n", "", "prerequisites[0].uri", "is missing"),
    ("    type: dockerimage\n", "    type: image\n", "prerequisites[0].type", "one of script"),
    ("virtualCluster: \"default\"", "deployment: fast", "defaults.deployment", "not one of"),
    ("    - plugin: ssh\n", "    - plugins: ssh\n",
     "extras.com.microsoft.pai.runtimeplugin[0].plugin", "is missing"),
    ("instances: 1", "instances: 0", "taskRoles.master.instances", "at least 1"),
]

# Where systems keep what they trust; None: nowhere.
SYSTEM_CERTIFICATES = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    None,
]


class Files(Case):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)

    def file(self, name, text):
        path = self.directory / name
        path.write_text(text)
        return path

    def assert_wrong(self, name, text, path, part):
        file = self.file(name, text)
        _, err = run("pai", "check", file, expect=2)
        lines = [line for line in err.splitlines() if f": {path}: " in line]
        self.assertTrue(lines, f"{path} is not named in:\n{err}")
        self.assertRegex(lines[0], rf"^{re.escape(str(file))}:\d+: ")
        self.assertTrue(any(part in line for line in lines), err)

    def test_the_seed_is_right(self):
        out, err = run("pai", "check", SEED)
        self.assertEqual(out, f"{SEED}: 1 warning, no errors in this v1 job\n")
        # It works as it is, by guessing a time; there is a better way.
        self.assertEqual(err.count("\n"), 1, err)
        self.assertIn('warning: taskRoles[0].command: "sleep 1000" guesses when the other tasks '
                      'are up; "horovodrun --pai COMMAND" waits', err)

    def test_sleeping_alone_is_no_waiting(self):
        job = json.loads(SEED.read_text())
        told = "guesses when the other tasks are up"
        for command, is_told in [("sleep 1000", False), ("sleep infinity", False),
                                 ("sleep 1000 ; ", False), ("./sleep 1000 && a", False),
                                 ("echo a && sleep 10", False), ("sleeper 9 && a", False),
                                 ("sleep 60 && python train.py", True), ("sleep 60; a", True),
                                 ("sleep 60\npython train.py", True)]:
            with self.subTest(command=command):
                job["taskRoles"][0]["command"] = command
                _, err = run("pai", "check", self.file("job.json", json.dumps(job)))
                self.assertEqual(told in err, is_told, err)
        text = new_job("v2")
        line = next(line for line in text.splitlines() if "horovodrun --pai " in line)
        indent = line[:line.index("-")]
        for lines, is_told in [([line], False), ([f"{indent}- sleep 60"], False),
                               ([f"{indent}- sleep 60", f"{indent}- python train.py"], True),
                               ([f"{indent}- sleep 60 && python train.py"], True)]:
            with self.subTest(lines=lines):
                _, err = run("pai", "check", self.file(
                    "job.yaml", text.replace(line, "\n".join(lines))))
                self.assertEqual(told in err, is_told, err)

    def test_planted_errors_of_v1(self):
        seed = json.loads(SEED.read_text())
        for change, path, part in WRONG_V1:
            with self.subTest(path=path, part=part):
                job = copy.deepcopy(seed)
                change(job)
                self.assert_wrong("job.json", json.dumps(job, indent="\t"), path, part)

    def test_v1_is_json(self):
        seed = SEED.read_text()
        job = json.loads(seed)
        roles = "".join(f"  - name: {role['name']}\n    command: x\n" for role in job["taskRoles"])
        first = next(i for i, line in enumerate(seed.splitlines(), 1) if '"jobName"' in line)
        for what, text, line in [
                ("a comma too many", seed.rstrip()[:-1].rstrip() + ",\n}\n",
                 len(seed.rstrip().splitlines())),
                ("a comment", seed.replace("{", "{ # mine", 1), 1),
                ("quotes of one stroke", seed.replace('"jobName"', "'jobName'"), first),
                ("True", seed.replace('"jobName"', '"retryCount": True, "jobName"'), first),
                ("YAML", f"jobName: a\nimage: i\ntaskRoles:\n{roles}", 1)]:
            with self.subTest(what):
                self.assertNotEqual(text, seed)
                file = self.file("job.json", text)
                _, err = run("pai", "check", file, expect=2)
                self.assertIn(f"{file}, line {line}: a v1 job is JSON: here, at ", err)
                self.assertEqual(err.count("\n"), 1)

    def test_planted_errors_of_v2(self):
        text = new_job("v2")
        for old, new, path, part in WRONG_V2:
            with self.subTest(path=path, part=part):
                self.assertIn(old, text)
                self.assert_wrong("job.yaml", text.replace(old, new, 1), path, part)

    def test_every_finding_is_told(self):
        job = json.loads(SEED.read_text())
        for change, _, _ in (WRONG_V1[0], WRONG_V1[7], WRONG_V1[13]):
            change(job)
        _, err = run("pai", "check", self.file("job.json", json.dumps(job)), expect=2)
        self.assertIn("3 problems found", err)

    def test_warnings(self):
        job = json.loads(SEED.read_text())
        job["jobEnvs"]["paiAzRDMA"] = "true"
        job["killAllOnCompletedTaskNumber"] = 1
        _, err = run("pai", "check", self.file("job.json", json.dumps(job)))
        self.assertIn("warning: jobEnvs.paiAzRDMA: does nothing", err)
        self.assertIn("warning: killAllOnCompletedTaskNumber: is obsolete", err)

    def test_no_job_at_all(self):
        for text in ("", "[]", "7", '{"a":', "{a: b: c}", "\0"):
            with self.subTest(text=text):
                run("pai", "check", self.file("job.json", text), expect=2)
        run("pai", "check", self.directory, expect=2)
        run("pai", "check", self.directory / "nothing", expect=2)

    def test_v1_is_what_the_seed_is(self):
        seed, job = json.loads(SEED.read_text()), json.loads(new_job("v1"))
        self.assertEqual(job.pop("retryCount"), 0)
        self.assertEqual(job["taskRoles"][0].pop("command"), "horovodrun --pai python train.py")
        self.assertEqual(job["taskRoles"][1].pop("command"), "horovodrun --pai-worker")
        self.assertIsNone(job["taskRoles"][1].pop("minSucceededTaskCount"))
        for role in seed["taskRoles"]:
            del role["command"]
        del seed["taskRoles"][1]["minSucceededTaskCount"]
        self.assertEqual(job, seed)

    def test_written_jobs_are_right(self):
        for form in ("v1", "v2"):
            for words in ([], ["--workers", 0], ["--workers", 7, "--cpus", 6, "--memory-mb", 512,
                                                 "--shm-mb", 512, "--retries", 2, "--mpi",
                                                 "--virtual-cluster", 'a"b\\c']):
                with self.subTest(form=form, words=words):
                    name = f"job.{form}"
                    run(*INIT, "--format", form, *words, "--output", self.directory / name, "true")
                    out, _ = run("pai", "check", self.directory / name)
                    self.assertIn(f"this {form} job", out)
        self.assertIn("infiniband: true", new_job("v2"))

    def test_templates_are_right(self):
        templates = sorted((ROOT / "deploy/openpai").glob("job-*"))
        self.assertEqual(len(templates), 4)
        out, err = run("pai", "check", *templates)
        self.assertEqual(out.count("no problems found"), 4)
        self.assertEqual(err, "")

    def test_commands(self):
        for words, command in [(["a", "b c"], "a 'b c'"), (["a b"], "a b"),
                               (["cd x && a"], "sh -c 'cd x && a'")]:
            job = json.loads(run(*INIT, "--format", "v1", *words)[0])
            self.assertEqual(job["taskRoles"][0]["command"], f"horovodrun --pai {command}")

    def test_wrong_use(self):
        for words, part in [(["pai"], "init, check"), (["pai", "inti"], "inti"),
                            (["pai", "init", "true"], "the image or the command is missing"),
                            (["pai", "init", "--wokers", "1"], "--workers"),
                            (["pai", "init", "--workers"], "needs a value"),
                            (["pai", "init", "--workers", "many"], "--workers"),
                            (["pai", "submit"], "takes FILE"),
                            ([*INIT, "--format", "v1", "--shm-mb", 99999, "true"], "memoryMB"),
                            ([*INIT, "--format", "v2", "--shm-mb", 99999, "true"], "memoryMB"),
                            ([*INIT, "--name", "a b", "true"], "name")]:
            with self.subTest(words=words):
                self.assertIn(part, run(*words, expect=2)[1])
        self.assertIn("--virtual-cluster", run("pai", "--help")[0])
        self.assertIn("--virtual-cluster", run("pai", "init", "--help")[0])


class Server(Case):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)
        self.jobs = {}
        for form in ("v1", "v2"):
            self.jobs[form] = self.directory / f"job.{form}"
            run(*INIT, "--format", form, "--workers", 2, "--output", self.jobs[form], "true")
        self.token = self.directory / "token"
        self.token.write_text(TOKEN + "\n")

    def ask(self, server, *words, user="alice", token=True, env=None, **options):
        return run("pai", words[0], "--server", server.url,
                   *(["--user", user] if user else []),
                   *(["--token-file", self.token] if token else []), *words[1:],
                   env={"no_proxy": "*", "SSL_CERT_FILE": "", **(env or {})}, **options)

    def test_a_job_from_submit_to_stop(self):
        for form in ("v1", "v2"):
            with self.subTest(form=form), serve() as server:
                out, _ = self.ask(server, "submit", self.jobs[form])
                self.assertEqual(out, "submitted alice~horovod-job\n")
                method, path, headers, body = server.requests[-1]
                self.assertEqual(method, "POST")
                self.assertEqual(body, self.jobs[form].read_text())
                self.assertEqual(headers["Authorization"], f"Bearer {TOKEN}")
                api = ["--api", form]
                out, _ = self.ask(server, "status", *api, "horovod-job")
                self.assertRegex(out, r"^alice~horovod-job: RUNNING\n")
                self.assertRegex(out, r"worker-1 +RUNNING +10\.0\.0\.5\n")
                out, _ = self.ask(server, "stop", *api, "alice~horovod-job", user=None)
                self.assertIn("is being stopped", out)
                server.jobs["alice", "horovod-job"]["exit_code"] = 3
                out, _ = self.ask(server, "status", *api, "horovod-job")
                self.assertRegex(out, r"^alice~horovod-job: STOPPED, exit code 3\n")

    def test_logs(self):
        with serve() as server:
            self.ask(server, "submit", self.jobs["v2"])
            out, _ = self.ask(server, "logs", "horovod-job")
            for task in ("master-0", "worker-0", "worker-1"):
                self.assertIn(f"the log of {task}\n", out)
            # The token is for the server, not for wherever logs are.
            for _, path, headers, _ in server.requests:
                if "/log/" in path:
                    self.assertEqual("Authorization" in headers, "/master/" in path, path)
            out, _ = self.ask(server, "logs", "--task", "worker-1", "horovod-job")
            self.assertNotIn("master-0", out)
            _, err = self.ask(server, "logs", "--task", "nope-3", "horovod-job", expect=2)
            self.assertIn("alice~horovod-job has no task nope-3", err)
            server.jobs["alice", "horovod-job"]["roles"] = {"page": 1}
            out, _ = self.ask(server, "logs", "horovod-job")
            self.assertRegex(out, r"^==> page-0: http://localhost:\d+/log/[\w/-]+/0 <==\n$")

    def test_logs_that_cannot_be_had(self):
        with serve() as server:
            self.ask(server, "submit", self.jobs["v2"])
            for role, expect in (("gone", 1), ("nobody", 69)):
                with self.subTest(role=role):
                    server.jobs["alice", "horovod-job"]["roles"] = {role: 1, "worker": 1}
                    out, err = self.ask(server, "logs", "horovod-job", expect=expect)
                    self.assertIn("the log of worker-0\n", out)
                    self.assertEqual(err.count("\n"), 1)

    def test_server_with_a_slash_at_its_end(self):
        with serve() as server:
            url = server.url
            self.ask(server, "submit", self.jobs["v2"])
            server.url += "/"
            out, _ = self.ask(server, "logs", "--task", "master-0", "horovod-job")
            self.assertIn("the log of master-0\n", out)
            self.assertIn(f"==> master-0: {url}/log/", out)

    def test_refusals_are_told_in_the_servers_words(self):
        job = json.loads(self.jobs["v1"].read_text())
        odd = self.directory / "odd.json"
        odd.write_text(json.dumps({**job, "extras": {"sshPort": 22}}))
        bad = self.directory / "bad.json"
        bad.write_text(json.dumps({**job, "image": "explode"}))
        with serve() as server:
            self.ask(server, "submit", self.jobs["v1"])
            for words, options, parts in [
                    (["submit", self.jobs["v1"]], {}, ["409 ConflictJobError", "already exists"]),
                    (["submit", self.jobs["v2"]], {"token": False},
                     ["401 UnauthorizedUserError", "--token-file"]),
                    (["submit", odd], {}, ["400 InvalidParametersError", '"sshPort" is taken']),
                    (["submit", bad], {}, ["500 UnknownError", "Unexpected token"]),
                    (["status", "nothing"], {}, ["404 NoJobError", "nothing is not found"]),
                    (["stop", "--api", "v1", "nothing"], {}, ["404 NoJobError"]),
                    (["stop", "mallory~x"], {}, ["403 ForbiddenUserError", "mallory"])]:
                with self.subTest(words=words):
                    _, err = self.ask(server, *words, expect=1, **options)
                    for part in parts:
                        self.assertIn(part, err)
            server.requests.clear()
            odd.write_text(json.dumps({**job, "extra": {}}))
            self.ask(server, "submit", odd, expect=2)
            self.assertEqual(server.requests, [], "a job known to be wrong is not sent")

    def test_warning_of_the_server(self):
        job = json.loads(self.jobs["v1"].read_text()) | {"killAllOnCompletedTaskNumber": 1}
        self.jobs["v1"].write_text(json.dumps(job))
        with serve() as server:
            _, err = self.ask(server, "submit", self.jobs["v1"])
            self.assertIn("the server warns: killAll", err)

    def test_token_of_the_environment(self):
        with serve() as server:
            self.ask(server, "submit", self.jobs["v2"], token=False,
                     env={"HOROVODRUN_PAI_TOKEN": TOKEN})
            self.token.write_text("\n")
            self.ask(server, "stop", "horovod-job", expect=2)

    def test_wrong_use(self):
        for words, part in [(["status", "u~x"], "--server"),
                            (["status", "--server", "ftp://x", "u~x"], "https://"),
                            (["status", "--server", "http://127.0.0.1:9", "x"], "--user"),
                            (["status", "--server", "http://127.0.0.1:9", "u~a/b"], "a/b"),
                            (["stop", "--server", "http://127.0.0.1:9", "--token-file",
                              "/nonexistent", "u~x"], "/nonexistent")]:
            with self.subTest(words=words):
                self.assertIn(part, run("pai", *words, expect=2)[1])
        _, err = run("pai", "status", "--server", "http://127.0.0.1:9", "u~x", expect=69,
                     env={"no_proxy": "*"})
        self.assertIn("is the server up?", err)

    def certificate(self, *key, name="DNS:localhost"):
        """PEM files: of a server with its key, and of the authority that has signed it, itself."""
        pem, authority = self.directory / "server.pem", self.directory / "ca.pem"
        subprocess.run(["openssl", "req", "-x509", "-newkey", *key, "-nodes", "-days", "2",
                        "-subj", "/CN=localhost", "-addext", f"subjectAltName={name}",
                        "-keyout", pem, "-out", authority], check=True, capture_output=True)
        pem.write_text(pem.read_text() + authority.read_text())
        return pem, authority

    def test_tls_is_verified(self):
        for key, tls in [(["rsa:2048"], ssl.TLSVersion.TLSv1_2),
                         (["ec", "-pkeyopt", "ec_paramgen_curve:P-256"], ssl.TLSVersion.TLSv1_2),
                         (["rsa:3072"], ssl.TLSVersion.TLSv1_3),
                         (["ec", "-pkeyopt", "ec_paramgen_curve:P-384"], ssl.TLSVersion.TLSv1_3)]:
            pem, authority = self.certificate(*key)
            with self.subTest(key=key, tls=tls), serve(pem, tls) as server:
                _, err = self.ask(server, "submit", self.jobs["v2"], expect=69)
                self.assertIn("--ca-file", err)
                self.assertEqual(server.requests, [])
                self.ask(server, "submit", "--ca-file", authority, self.jobs["v2"])
                server.url = server.url.replace("localhost", "127.0.0.1")  # not its own name
                self.ask(server, "status", "--ca-file", authority, "horovod-job", expect=69)

    def test_certificates_of_the_environment(self):
        pem, authority = self.certificate("rsa:2048")
        other = self.directory / "other.pem"
        other.write_text("no certificate\n")
        with serve(pem) as server:
            self.ask(server, "submit", self.jobs["v2"], env={"SSL_CERT_FILE": str(authority)})
            self.ask(server, "status", "--ca-file", authority, "horovod-job",
                     env={"SSL_CERT_FILE": str(other)})
            _, err = self.ask(server, "status", "--ca-file", other, "horovod-job", expect=69,
                              env={"SSL_CERT_FILE": str(authority)})
            self.assertIn("must be a file of certificates in PEM", err)

    def test_certificates_of_the_system(self):
        pem, authority = self.certificate("rsa:2048", name="IP:127.0.0.1")
        for file in SYSTEM_CERTIFICATES:
            with self.subTest(file=file), serve(pem) as server:
                server.url = server.url.replace("localhost", "127.0.0.1")  # needs no /etc/hosts
                put_it = f"install -D -m 644 {authority} {file}" if file else "true"
                etc = ["unshare", "--mount", "sh", "-c",
                       f'mount -t tmpfs none /etc && {put_it} && exec "$@"', "sh"]
                _, err = self.ask(server, "submit", self.jobs["v2"], before=etc,
                                  expect=0 if file else 69)
                self.assertEqual("install ca-certificates" in err, file is None, err)


if __name__ == "__main__":
    main()
