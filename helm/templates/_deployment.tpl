{{/*
One component's Deployment. Takes root, component, pod (its section of the values), user, labels of the Pods besides
those of selectors, grpcPort and isScaled, and as YAML: image, flags, ports, env, resources, addedCapabilities,
volumes, volumeMounts.
*/}}
{{- define "pdserve.deployment" -}}
{{- $name := printf "%s-%s" (include "pdserve.fullname" .root) .component -}}
{{- $unset := printf "%s: config.drain_timeout_s is unset" .component -}}
{{- $drain := required $unset .pod.config.drain_timeout_s | ceil | int -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "pdserve.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  {{- if not .isScaled }}
  replicas: {{ .pod.replicas }}
  {{- else }}
  {{- /* What runs goes on: without a number that was there before, Kubernetes takes 1. */}}
  {{- with lookup "apps/v1" "Deployment" .root.Release.Namespace $name | dig "spec" "replicas" 0 }}
  replicas: {{ . }}
  {{- end }}
  {{- end }}
  minReadySeconds: {{ .pod.minReadySeconds }}
  # Loading is no progress that Kubernetes sees.
  progressDeadlineSeconds: {{ add .pod.startupTimeoutSeconds .pod.minReadySeconds 600 }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      {{- toYaml .pod.rollingUpdate | nindent 6 }}
  selector:
    matchLabels:
      {{- include "pdserve.selectorLabels" .root | nindent 6 }}
      app.kubernetes.io/component: {{ .component }}
  template:
    metadata:
      {{- with .pod.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      labels:
        {{- with .pod.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- include "pdserve.selectorLabels" .root | nindent 8 }}
        app.kubernetes.io/component: {{ .component }}
        {{- with .labels }}
        {{- . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ include "pdserve.serviceAccountName" .root | quote }}
      automountServiceAccountToken: false
      # A Service named pdserve would set PDSERVE_PORT, which is a setting of ours.
      enableServiceLinks: false
      {{- with .root.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "pdserve.podSecurity" .user | trim | nindent 8 }}
      # Waiting for endpoints to follow, draining, and what comes after.
      terminationGracePeriodSeconds: {{ add .pod.preStopSeconds $drain .pod.terminationMarginSeconds }}
      {{- with include "pdserve.modelInitContainers" . }}
      initContainers:
        {{- . | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ .component }}
          {{- .image | nindent 10 }}
          command: [pdserve-{{ .component }}]
          args:
            - --host=0.0.0.0
            {{- include "pdserve.modelFlags" .root | nindent 12 }}
            {{- with include "pdserve.tlsFlags" .root | trim }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with .root.Values.tracing.otlpTracesEndpoint }}
            - {{ printf "--otlp-traces-endpoint=%s" . | quote }}
            {{- end }}
            {{- .flags | nindent 12 }}
            {{- include "pdserve.flags" .pod.config | trim | nindent 12 }}
          env:
            # Caches go below it.
            - {name: HOME, value: /tmp}
            {{- with .env }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with .pod.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            {{- .ports | nindent 12 }}
          # A worker answers once its model is loaded and has generated.
          startupProbe:
            {{- include "pdserve.probe" (dict "ctx" . "service" "liveness" "path" "/live") | nindent 12 }}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: {{ div (add .pod.startupTimeoutSeconds 4) 5 }}
          # Not while it is paused, asleep or draining; of a router: not without workers.
          readinessProbe:
            {{- include "pdserve.probe" (dict "ctx" . "service" "" "path" "/ready") | nindent 12 }}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 2
          # Answered by the loop that watches the engine's steps.
          livenessProbe:
            {{- include "pdserve.probe" (dict "ctx" . "service" "liveness" "path" "/live") | nindent 12 }}
            periodSeconds: 10
            timeoutSeconds: 10
            failureThreshold: 6
          {{- if .pod.preStopSeconds }}
          lifecycle:
            preStop:
              sleep: {seconds: {{ .pod.preStopSeconds }}}
          {{- end }}
          resources:
            {{- .resources | nindent 12 }}
          securityContext:
            {{- include "pdserve.containerSecurity" . | nindent 12 }}
            {{- with .addedCapabilities }}
              add: {{ . }}
            {{- end }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            {{- with include "pdserve.modelMounts" .root | trim }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with include "pdserve.tlsMounts" .root | trim }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with .volumeMounts }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with .pod.volumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        - {name: tmp, emptyDir: {}}
        {{- with include "pdserve.modelVolumes" .root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with include "pdserve.tlsVolumes" .root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with .volumes }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with .pod.volumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with .pod.topologySpread }}
      topologySpreadConstraints:
        {{- range . }}
        - topologyKey: {{ .topologyKey | quote }}
          whenUnsatisfiable: {{ .whenUnsatisfiable }}
          maxSkew: 1
          labelSelector:
            matchLabels:
              {{- include "pdserve.selectorLabels" $.root | nindent 14 }}
              app.kubernetes.io/component: {{ $.component }}
          # Each ReplicaSet by itself: old Pods are about to go.
          matchLabelKeys: [pod-template-hash]
        {{- end }}
      {{- end }}
      {{- with .pod.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .pod.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .pod.affinity }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .pod.priorityClassName }}
      priorityClassName: {{ quote . }}
      {{- end }}
{{- end }}
