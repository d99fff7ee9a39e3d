// Runs the Worker of wrangler.jsonc on this machine with Emberline as its `AI` binding: no login, no account.
//   node dev.mjs          EMBERLINE=http://127.0.0.1:8686  PORT=8787  MODEL=…
import { execFileSync } from "node:child_process";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { Miniflare } from "miniflare";
import { unstable_getMiniflareWorkerOptions } from "wrangler";

const folder = dirname(fileURLToPath(import.meta.url));
const emberline = new URL(process.env.EMBERLINE ?? "http://127.0.0.1:8686");
const wrangler = join(dirname(createRequire(import.meta.url).resolve("wrangler/package.json")), "bin", "wrangler.js");
execFileSync(process.execPath, [wrangler, "deploy", "--dry-run", "--outdir", "dist"], { cwd: folder, stdio: "ignore" });

const config = join(folder, "wrangler.jsonc");
const { workerOptions } = unstable_getMiniflareWorkerOptions(config, undefined, { remoteProxyConnectionString: emberline });
if (process.env.MODEL) workerOptions.bindings.MODEL = process.env.MODEL;
const miniflare = new Miniflare({
  port: Number(process.env.PORT ?? 8787),
  workers: [{ ...workerOptions, modules: true, rootPath: folder, scriptPath: join(folder, "dist", "server.js") }],
});
console.log(`${await miniflare.ready} with ${emberline}`);
for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => miniflare.dispose().then(() => process.exit(0)));
