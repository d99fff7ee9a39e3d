// Whether a text is a valid JSON schema, or a list of tools: what can be said before the server is asked.

const TYPES = new Set(["object", "array", "string", "number", "integer", "boolean", "null"]);
const SCHEMAS = ["items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"];
const LISTS = ["anyOf", "oneOf", "allOf", "prefixItems"];
const TABLES = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
const COUNTS = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"];
const NUMBERS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
const FUNCTION_NAME = /^[A-Za-z0-9_-]{1,64}$/;
const MAX_DEPTH = 100;

/** {schema} or {problem}. */
export function parseSchema(text) {
  const { value, problem } = parseJson(text || "");
  if (problem) return { problem };
  const found = schemaProblem(value, "", value, 0);
  return found ? { problem: found } : { schema: value };
}

/** {tools} or {problem}; an empty text has no tools. */
export function parseTools(text) {
  if (!text.trim()) return { tools: [] };
  const { value, problem } = parseJson(text);
  if (problem) return { problem };
  const tools = Array.isArray(value) ? value : [value];
  const names = new Set();
  for (const [i, tool] of tools.entries()) {
    const where = tools.length > 1 ? `tool ${i + 1}: ` : "";
    if (!isObject(tool) || tool.type !== "function" || !isObject(tool.function)) return { problem: `${where}must be {"type": "function", "function": {…}}` };
    const { name, parameters, description } = tool.function;
    if (typeof name !== "string" || !FUNCTION_NAME.test(name)) return { problem: `${where}"name" must be 1 to 64 letters, digits, _ and -` };
    if (names.has(name)) return { problem: `${where}another tool is named "${name}" too` };
    names.add(name);
    if (description !== undefined && typeof description !== "string") return { problem: `${where}"description" must be text` };
    const found = parameters === undefined ? null : schemaProblem(parameters, `${name}.parameters`, parameters, 0);
    if (found) return { problem: where + found };
  }
  return { tools };
}

function parseJson(text) {
  if (!text.trim()) return { problem: "it is empty" };
  try {
    return { value: JSON.parse(text) };
  } catch (error) {
    return { problem: String(error.message).replace(/^JSON\.parse: /, "") };
  }
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** What is wrong with a schema, with the path to it; null if nothing is. */
function schemaProblem(schema, path, root, depth) {
  const here = path || "the schema";
  if (depth > MAX_DEPTH) return `${here} is nested too deeply`;
  if (typeof schema === "boolean") return null;
  if (!isObject(schema)) return `${here} must be an object`;
  const types = schema.type === undefined ? [] : [schema.type].flat();
  for (const type of types) if (!TYPES.has(type)) return `${here}: "type" ${JSON.stringify(type)} is none of ${[...TYPES].join(", ")}`;
  if (schema.required !== undefined && !(Array.isArray(schema.required) && schema.required.every((name) => typeof name === "string"))) {
    return `${here}: "required" must be a list of names`;
  }
  if (schema.enum !== undefined && !(Array.isArray(schema.enum) && schema.enum.length)) return `${here}: "enum" must be a list with at least one value`;
  for (const name of COUNTS) if (schema[name] !== undefined && !(Number.isInteger(schema[name]) && schema[name] >= 0)) return `${here}: "${name}" must be a whole number from 0`;
  for (const name of NUMBERS) if (schema[name] !== undefined && typeof schema[name] !== "number") return `${here}: "${name}" must be a number`;
  if (schema.pattern !== undefined && !isPattern(schema.pattern)) return `${here}: "pattern" is not a regular expression`;
  if (schema.$ref !== undefined && !resolves(schema.$ref, root)) return `${here}: "$ref" ${JSON.stringify(schema.$ref)} leads nowhere`;
  const inner = (value, step) => schemaProblem(value, path ? `${path}.${step}` : step, root, depth + 1);
  for (const name of SCHEMAS) {
    const found = schema[name] === undefined ? null : inner(schema[name], name);
    if (found) return found;
  }
  for (const name of LISTS) {
    if (schema[name] === undefined) continue;
    if (!Array.isArray(schema[name]) || !schema[name].length) return `${here}: "${name}" must be a list of schemas`;
    for (const [i, value] of schema[name].entries()) {
      const found = inner(value, `${name}[${i}]`);
      if (found) return found;
    }
  }
  for (const name of TABLES) {
    if (schema[name] === undefined) continue;
    if (!isObject(schema[name])) return `${here}: "${name}" must be an object of schemas`;
    for (const [key, value] of Object.entries(schema[name])) {
      const found = inner(value, `${name}.${key}`);
      if (found) return found;
    }
  }
  return null;
}

function isPattern(pattern) {
  try {
    return typeof pattern === "string" && Boolean(new RegExp(pattern, "u"));
  } catch {
    return false;
  }
}

function resolves(ref, root) {
  if (typeof ref !== "string" || !ref.startsWith("#")) return false;
  let value = root;
  for (const step of ref.slice(1).split("/").slice(1)) {
    const key = decodeURIComponent(step).replaceAll("~1", "/").replaceAll("~0", "~");
    if (typeof value !== "object" || value === null || !Object.hasOwn(value, key)) return false;
    value = value[key];
  }
  return true;
}
