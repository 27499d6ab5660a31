// Runs every check, whatever became of the others; prints the package's version and a line for each.
const { readFileSync } = require("node:fs");
const { join } = require("node:path");

// Not every package exports its package.json.
function versionOf(name) {
  return JSON.parse(readFileSync(join(process.env.NODE_PATH, name, "package.json"))).version;
}

exports.runChecks = async (name, checks) => {
  console.log(`version ${versionOf(name)}`);
  let failed = 0;
  for (const check of checks) {
    try {
      await check();
      console.log(`ok ${check.name}`);
    } catch (error) {
      failed = 1;
      console.log(error.stack);
      console.log(`FAILED ${check.name}: ${error.message}`);
    }
  }
  process.exit(failed);
};
