// Checks manifests of custom resources against their operators' schemas. Takes the folder of the npm packages and, on
// standard input, a JSON list of manifests; prints a JSON list of problems.
//
// The schemas accept fields they do not know. So each value is replaced by one that no field takes, in turn: if that
// is accepted, the field is unknown.
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const KINDS = {
  Certificate: "cert-manager/cert-manager.io/v1/Certificate.js",
  PodMonitor: "prometheus-operator/monitoring.coreos.com/v1/PodMonitor.js",
  PrometheusRule: "prometheus-operator/monitoring.coreos.com/v1/PrometheusRule.js",
  ScaledObject: "keda/keda.sh/v1alpha1/ScaledObject.js",
};
const NO_FIELD_TAKES_THIS = [[[]]];

async function validatorOf(kind) {
  const path = resolve(process.argv[2], "@kubernetes-models", KINDS[kind]);
  const model = (await import(pathToFileURL(path)))[kind];
  return (manifest) => {
    try {
      new model(manifest).validate();
      return "";
    } catch (error) {
      return error.message;
    }
  };
}

function* pathsOf(value, path = []) {
  if (value === null || typeof value !== "object") {
    yield path;
    return;
  }
  for (const key of Object.keys(value)) yield* pathsOf(value[key], [...path, key]);
}

function withBadValue(manifest, path) {
  const copy = structuredClone(manifest);
  const parent = path.slice(0, -1).reduce((value, key) => value[key], copy);
  parent[path.at(-1)] = NO_FIELD_TAKES_THIS;
  return copy;
}

const problems = [];
for (const manifest of JSON.parse(readFileSync(0, "utf8"))) {
  const check = await validatorOf(manifest.kind);
  const name = `${manifest.kind} ${manifest.metadata.name}`;
  const message = check(manifest);
  if (message) problems.push(`${name}: ${message}`);
  for (const path of pathsOf(manifest)) {
    if (!check(withBadValue(manifest, path))) problems.push(`${name}: unknown field ${path.join(".")}`);
  }
}
console.log(JSON.stringify(problems));
