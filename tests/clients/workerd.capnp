# A Worker in plain workerd, with the server as the service behind its `AI` binding. (The `agents` package needs a module
# that only miniflare adds.)
using Workerd = import "/workerd/workerd.capnp";

const config :Workerd.Config = (
  services = [
    ( name = "worker", worker = (
      modules = [ ( name = "worker.js", esModule = embed "plain_worker.js" ) ],
      compatibilityDate = "2026-07-01",
      bindings = [
        ( name = "AI", wrapped = (
          moduleName = "cloudflare-internal:ai-api",
          innerBindings = [ ( name = "fetcher", service = "emberline" ) ] ) ),
        ( name = "MODEL", text = "@cf/huggingfacetb/smollm2-135m-instruct" ) ] ) ),
    ( name = "emberline", external = ( address = "127.0.0.1:8686", http = () ) ),
  ],
  sockets = [ ( name = "http", address = "127.0.0.1:8787", http = (), service = "worker" ) ],
);
