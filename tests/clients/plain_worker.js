// The binding alone, at the paths of the example.
export default {
  async fetch(request, env) {
    const url = new URL(request.url);
    const prompt = url.searchParams.get("q");
    switch (url.pathname) {
      case "/run":
        return Response.json(await env.AI.run(env.MODEL, { prompt }));
      case "/stream":
        return new Response(await env.AI.run(env.MODEL, { prompt, stream: true }));
      case "/models":
        return Response.json(await env.AI.models());
      default:
        return env.AI.run("@cf/none/such", { prompt }).catch(({ name, message }) => Response.json({ name, message }));
    }
  },
};
